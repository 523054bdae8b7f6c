"""The dashboard: a read-only web view of a database, live while studies run.

``thrifty.web`` needs the extra ``web``. Modules that import FastAPI are loaded on first use.
"""

from ._serve import Server, create_app, serve


__all__ = ["Server", "create_app", "serve"]
