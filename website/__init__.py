"""What builds the site from docs/, the code and its docstrings: ``python -m mkdocs build --strict``, see mkdocs.yml."""
