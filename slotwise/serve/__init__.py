"""An OpenAI-compatible server over one engine. Knows HTTP; the engine knows nothing of it."""
