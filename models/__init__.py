"""Model files: what is on the machine, what is in them, where more come from, and copies made of them."""
