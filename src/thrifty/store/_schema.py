"""The tables. Migrations in ``migrations/`` bring an older database to this."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)


VERSION = "0007"

metadata = MetaData()

# Alembic's own table, under a name that tells whose it is
version_table = Table(
    "thrifty_version", metadata, Column("version_num", String(32), primary_key=True)
)

plans = Table(
    "plans",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("identity", String(64), nullable=False, unique=True),
    # equal for plans that train the same and differ in their metrics; NULL for plans of version 4
    Column("family", String(64), index=True),
    Column("task", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    # grows with each batch of records; held to the commit, so rows of a plan become visible in its order
    Column("revision", BigInteger, nullable=False, server_default="0"),
    # of each worker on a CPU; results may depend on it, so it stays what it was for the first run
    Column("threads", Integer),
)

# structures of a plan that are not fused, because a check has failed
refusals = Table(
    "refusals",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    # whose run has found it; no foreign key, because the refusal outlives the study
    Column("study", Integer),
    Column("at", Float, nullable=False),
)

# which processes run a study now
leases = Table(
    "leases",
    metadata,
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("plan", ForeignKey("plans.id"), nullable=False, index=True),
    Column("owner", String(64), nullable=False),
    Column("name", Text, nullable=False),
    # whether other studies of the plan may run beside it
    Column("shared", Boolean, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", Text, nullable=False),
    Column("since", Float, nullable=False),
    Column("heartbeat", Float, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("start", Integer, nullable=False),
    Column("config", JSON, nullable=False),
    Column("epochs", Integer, nullable=False),
    # of the plan, when an epoch or a state of the node was last written
    Column("revision", BigInteger, nullable=False, server_default="0"),
)

# what a driver is training now, a row for each node of a chain of stages
claims = Table(
    "claims",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("start", Integer, nullable=False),
    Column("stop", Integer, nullable=False),
    Column("owner", String(64), nullable=False, index=True),
)

epochs = Table(
    "epochs",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column(
        "metrics", Text, nullable=False
    ),  # JSON with NaN and Infinity, which the JSON type of some databases refuses
    Column("seconds", Float, nullable=False),
    Column("worker", Text, nullable=False),
    # the part of the seconds that went into checks
    Column("seconds_checks", Float, nullable=False, server_default="0"),
    # NULL where that was not measured; both ends are NULL where the trial was trained alone
    Column("seconds_alone", Float),
    Column("seconds_alone_low", Float),
    Column("seconds_alone_high", Float),
    # the study whose run trained it first; no foreign key, because the epoch outlives the study
    Column("study", Integer),
    # whether it was not trained: its state was kept, and evaluated again
    Column("evaluated", Boolean),
    # how often it was trained again, because its state was gone, and for how long
    Column("again", Integer, nullable=False, server_default="0"),
    Column("again_s", Float, nullable=False, server_default="0"),
    Column("again_checks_s", Float, nullable=False, server_default="0"),
    Column("again_alone_s", Float, nullable=False, server_default="0"),
    # NULL where a part of it was not measured
    Column("again_alone_low_s", Float, server_default="0"),
    Column("again_alone_high_s", Float, server_default="0"),
    Column("revision", BigInteger, nullable=False, server_default="0"),
    Index("epochs_revision", "plan", "revision"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    # of its last epoch, for a state that comes from another plan; its file is that plan's
    Column("train_loss", Float),
    Column("revision", BigInteger, nullable=False, server_default="0"),
    Index("checkpoints_revision", "plan", "revision"),
)

stages = Table(
    "stages",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("plan", ForeignKey("plans.id"), nullable=False, index=True),
    Column("node", Integer, nullable=False),
    Column("start", Integer, nullable=False),
    Column("stop", Integer, nullable=False),
    Column("worker", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("started_at", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("error", Text, nullable=False),
)

studies = Table(
    "studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("plan", ForeignKey("plans.id"), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    # the last batch of records that its drivers have written: none is written twice
    Column("batch", BigInteger, nullable=False, server_default="0"),
)

trials = Table(
    "trials",
    metadata,
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("config", JSON, nullable=False),
    Column("node", Integer, nullable=False),
    Column("group", JSON, nullable=False),
    Column("parent", JSON),
    Column("state", String(16), nullable=False),
    Column("target", Integer, nullable=False),
    Column("reached", Integer, nullable=False),
    Column("value", Float),
    Column("error", JSON),
    # by name, where a study has several; NULL where it has one
    Column("objectives", JSON(none_as_null=True)),
    # NULL where a study has no constraints
    Column("violation", Float),
    # the status of a study must not read the trials themselves: this index has all it asks for
    Index("trials_status", "study", "state", "value", "number", "target", "violation"),
)

log = Table(
    "log",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    Column("trial", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("value", Float),
    Column("at", Float, nullable=False),
    # what was enqueued; ``trial`` is then its place in the queue
    Column("config", JSON(none_as_null=True)),
)

# what a study knew from earlier ones when it was made; a copy, so that a resumed study sees the same
priors = Table(
    "priors",
    metadata,
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("config", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("target", Integer, nullable=False),
    Column("metrics", Text, nullable=False),  # as in epochs: a list, one for each epoch
)

# how long packs of a structure take on a device; no study's, so that all may use them
curves = Table(
    "curves",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("device", Text, nullable=False),
    Column("structure", Text, nullable=False),
    Column("curves", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)
