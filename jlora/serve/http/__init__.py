"""The engine over HTTP, compatible with OpenAI's clients and vLLM's operators (extra `serve`)."""
