"""Model package for SGLANG_EXTERNAL_MODEL_PACKAGE: the classes of `derived_state`."""
