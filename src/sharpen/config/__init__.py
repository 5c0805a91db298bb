"""YAML and keyword arguments in; one resolved, validated, immutable run configuration out."""
