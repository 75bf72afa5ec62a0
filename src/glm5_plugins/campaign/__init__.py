"""Measuring which plugins pay: arms of servers, driven by SGLang's own benchmark, compared pair by pair."""
