"""Sources of drafts. Every drafter lives the same life: begin, draft, accept, truncate, close."""
