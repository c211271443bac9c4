"""Asynchronous rollouts: admission, dispatch, completion callbacks."""
