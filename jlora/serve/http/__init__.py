"""The engine over HTTP, as OpenAI's clients and vLLM's operators call it (extra `serve`)."""
