"""The dashboard: a read-only web view of a database, live while studies run.

``thrifty.web`` needs the extra ``web``; what imports FastAPI is loaded when it is called.
"""

from ._serve import Server as Server, create_app as create_app, serve as serve


__all__ = ["Server", "create_app", "serve"]
