"""A plugin for vLLM: each request names an expansion of the served folder, or none. Nothing else imports it."""
