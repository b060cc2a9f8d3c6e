"""A server of the OpenAI image API: an engine that owns the device, and HTTP around it."""
