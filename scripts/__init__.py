"""Programs for those who work on Quorum: pictures for the README, and what the page costs."""
