"""Parts of the site that MkDocs calls: `make site`, see mkdocs.yml."""
