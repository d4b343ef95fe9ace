"""`tp board`: curves of many runs in a browser. Read-only, for one user; the page itself is built from `web/`."""
