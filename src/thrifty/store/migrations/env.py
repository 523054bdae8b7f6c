"""Alembic's entry point: the connection comes from ``thrifty.store``."""

from alembic import context


def main() -> None:
    """Runs what ``_migrate.upgrade`` asked for."""
    context.configure(
        connection=context.config.attributes["connection"],
        version_table="thrifty_version",
        render_as_batch=True,
    )
    context.run_migrations()


# Alembic loads this file under a name of its own; anybody else only imports it
if __name__ == "env_py":
    main()
