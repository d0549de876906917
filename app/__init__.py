"""What the user touches: the terminal commands and the chat in the browser."""
