"""The way to an MLflow store: its address, a client that many processes may open, and errors a user can read.

A new SQLite store is created under a lock: several processes that open a fresh one at the same time break it for good,
because MLflow's migrations race (MLflow 3.17). It is made under another name first, because an interrupt in the middle
of them breaks it too.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.endings import postponed_interrupts
from runner.engine.errors import UserError
from runner.tracking.file_lock import file_lock
from runner.tracking.names import as_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_EXPERIMENT_NAME_LENGTH = 500  # MLflow's


def resolve_tracking_uri(tracking_uri: str | None) -> str:
    """The address given, else MLFLOW_TRACKING_URI, else mlflow.db in the current directory.

    Raises:
        UserError: no address leads to that directory.
    """
    return tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _sqlite_uri(Path.cwd() / "mlflow.db")


def connect(tracking_uri: str, experiment_name: str) -> tuple[MlflowClient, str]:
    """Opens the store, creating it and the experiment where missing; returns the client and the experiment's id.

    Raises:
        UserError: MLflow is not installed, the store cannot be used, or takes no experiment of that name.
    """
    _check_experiment_name(experiment_name)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default, 7, is minutes before a typo shows
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    with store_errors(tracking_uri):
        path = sqlite_path(tracking_uri)
        if path is not None and path.exists():
            path.open("r+b").close()  # MLflow would try a directory, or somebody else's file, for 100 s
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils"):  # each migration of a new database is a line otherwise
            logging.getLogger(name).setLevel(logging.WARNING)
        with file_lock(path) if path else nullcontext():
            if path is not None and not path.exists():
                _create(path)
            client = MlflowClient(tracking_uri=tracking_uri)
            return client, _experiment_id(client, experiment_name, path)


def _create(database: Path) -> None:
    """Whole or not at all; where a link leads, too."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database = database.resolve()
    new = database.with_name(f"{database.name}.new")
    new.unlink(missing_ok=True)  # of a start that was interrupted
    store: Any = SqlAlchemyStore
    store(_sqlite_uri(new), _artifact_uri(database.parent / "mlruns")).engine.dispose()
    new.replace(database)


def _experiment_id(client: MlflowClient, experiment_name: str, database: Path | None) -> str:
    experiment = client.get_experiment_by_name(experiment_name)
    if experiment is None:
        # MLflow would keep artifacts in the first run's current directory; beside the database they are found.
        artifacts = _artifact_uri(database.parent / "mlruns" / as_folder(experiment_name)) if database else None
        return str(client.create_experiment(experiment_name, artifact_location=artifacts))
    if experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"experiment_name must not be a deleted MLflow experiment, got {experiment_name!r}; choose another name, "
            f"or restore it: mlflow experiments restore --experiment-id {experiment.experiment_id}"
        )
    return str(experiment.experiment_id)


def _artifact_uri(directory: Path) -> str:
    """MLflow takes escapes in a path, too, for what they mean."""
    return directory.as_uri() if "%" in str(directory) else str(directory)


def _check_experiment_name(name: str) -> None:
    """MLflow would blame the store, and only once it has been made."""
    got = f"{len(name)}: {name[:40]!r}; set experiment_name=<another>"
    if not 0 < len(name) <= MAX_EXPERIMENT_NAME_LENGTH:
        raise UserError(f"experiment_name must have 1 to {MAX_EXPERIMENT_NAME_LENGTH} characters, got {got}")


def sqlite_path(tracking_uri: str) -> Path | None:
    """The database file of a sqlite address; None for every other store, and for what is in memory."""
    if not re.match(r"sqlite(\+\w+)?:///", tracking_uri):
        return None
    from sqlalchemy import make_url

    database = make_url(tracking_uri).database
    return Path(database).absolute() if database and not re.match(":memory:|file:", database) else None


def _sqlite_uri(database: Path) -> str:
    """The address of a database file. A "?" ends it, and from 2.1 on SQLAlchemy takes escapes in it for what they mean.

    One with escapes names the driver: for sqlite:/// alone MLflow makes directories, by the escapes' text.
    """
    uri = f"sqlite:///{database}"
    if "%" not in uri and "?" not in uri:
        return uri
    with store_errors(uri):
        from sqlalchemy import URL

        escaped = URL.create("sqlite+pysqlite", database=str(database)).render_as_string()
        if sqlite_path(escaped) == database:
            return escaped
    raise UserError(
        f"tracking_uri must be given here: SQLAlchemy reads no address as {str(database)!r}; "
        "set it to sqlite:///<another file>.db or the address of a server, or run with tracking=jsonl"
    )


@contextmanager
def store_errors(tracking_uri: str) -> Iterator[None]:
    """Turns the store's own exceptions into a UserError that names it; all others pass.

    An interrupt waits until a database has been written: MLflow's transaction would stay open, and hold the lock for
    which the next call waits.
    """
    try:
        with postponed_interrupts() if sqlite_path(tracking_uri) else nullcontext():
            yield
    except ModuleNotFoundError as error:
        package = error.name or "mlflow"
        brings_it = "mlflow" if package.startswith(("mlflow", "sqlalchemy")) else package
        raise UserError(
            f"tracking=mlflow needs the package {package}, which is not installed; "
            f"pip install {brings_it}, or run with tracking=jsonl"
        ) from error
    except Exception as error:
        if not _is_store_error(error):
            raise
        reason, path = _reason(error), sqlite_path(tracking_uri)
        remedy = "Use sqlite:///<file>.db or the address of a server"
        if path is not None and re.search("duplicate column|already exists", reason):
            remedy = f"Its tables are half made, as an interrupt leaves them: delete {path}"
        raise UserError(
            f"tracking_uri must be a store that MLflow can write to, got {tracking_uri!r}: {reason}\n"
            f"{remedy}, or run with tracking=jsonl."
        ) from error


def _is_store_error(error: Exception) -> bool:
    """MLflow's own errors, those of the database layers below it, the disk's, and of text that no store can hold."""
    families = {cls.__module__.split(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError | UnicodeEncodeError) or bool(families & {"mlflow", "sqlalchemy", "alembic"})


def _reason(error: Exception) -> str:
    """What the database said, where it did: the layers above begin with advice on their own use."""
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, "orig"):
        cause = cause.__cause__
    return str(getattr(cause, "orig", None) or error).strip().split("\n")[0]
