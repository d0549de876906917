"""The target's verdict on drafts."""
