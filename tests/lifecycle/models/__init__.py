"""What SGLang finds through SGLANG_EXTERNAL_MODEL_PACKAGE."""
