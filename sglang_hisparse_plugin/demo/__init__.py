"""The pointer-chasing model, and the real SGLang server that must answer it right."""
