"""The OpenAPI document of the routes. It describes them; bodies are still read raw by their own rooms."""
