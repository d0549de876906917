"""The OpenAI-compatible interface: what other programs ask, from their JSON to the request pool and back."""
