"""Alembic's entry point, on a connection from ``thrifty.store``."""

from alembic import context


def main() -> None:
    """Run the migrations that ``migrations.upgrade`` requested."""
    context.configure(
        connection=context.config.attributes["connection"],
        version_table="thrifty_version",
        render_as_batch=True,
    )
    context.run_migrations()


# Alembic loads this file under the name env_py. Any other import must not run migrations.
if __name__ == "env_py":
    main()
