"""The tables of the current schema. ``migrations/`` brings older databases to it."""

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
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)


VERSION = "0015"

metadata = MetaData()

# Alembic's version table, under a name that shows that it belongs to thrifty.
version_table = Table(
    "thrifty_version", metadata, Column("version_num", String(32), primary_key=True)
)

plans = Table(
    "plans",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("identity", String(64), nullable=False, unique=True),
    # Equal for plans that train the same and differ only in metrics; NULL for plans of version 4.
    Column("family", String(64), index=True),
    Column("task", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    # Grows with each batch of records. Its row stays locked until the commit, so the rows of a
    # plan become visible in the order of their revisions.
    Column("revision", BigInteger, nullable=False, server_default="0"),
    # CPU threads of each worker on a CPU. Results may depend on their number, so the first run
    # fixes it.
    Column("threads", Integer),
)

# Structures of a plan that must not be fused, because a check failed.
refusals = Table(
    "refusals",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    # The study in whose run the check failed. There is no foreign key, because the refusal
    # outlives the study.
    Column("study", Integer),
    Column("at", Float, nullable=False),
)

# The processes that run a study now.
leases = Table(
    "leases",
    metadata,
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("plan", ForeignKey("plans.id"), nullable=False, index=True),
    Column("owner", String(64), nullable=False),
    Column("name", Text, nullable=False),
    # Whether other studies of the plan may run at the same time.
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
    # Which of a study's seeds the node is trained with; 0 is the study's own seed.
    Column("replica", Integer, nullable=False, server_default="0"),
    # The plan's revision when an epoch or a state of the node was last written.
    Column("revision", BigInteger, nullable=False, server_default="0"),
)

# What drivers are training now: one row for each node of a chain of stages.
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
    ),  # JSON with NaN and Infinity, which the JSON type of some databases rejects
    Column("seconds", Float, nullable=False),
    Column("worker", Text, nullable=False),
    # The part of the seconds that was spent on checks.
    Column("seconds_checks", Float, nullable=False, server_default="0"),
    # NULL if it was not measured. Low and high are NULL if the trial was trained alone.
    Column("seconds_alone", Float),
    Column("seconds_alone_low", Float),
    Column("seconds_alone_high", Float),
    # The study whose run trained the epoch first. There is no foreign key, because the epoch
    # outlives the study.
    Column("study", Integer),
    # Whether the epoch was not trained, but only evaluated from a stored state.
    Column("evaluated", Boolean),
    # How often the epoch was trained again because its state was gone, and for how long.
    Column("again", Integer, nullable=False, server_default="0"),
    Column("again_s", Float, nullable=False, server_default="0"),
    Column("again_checks_s", Float, nullable=False, server_default="0"),
    Column("again_alone_s", Float, nullable=False, server_default="0"),
    # NULL if a part of the time was not measured.
    Column("again_alone_low_s", Float, server_default="0"),
    Column("again_alone_high_s", Float, server_default="0"),
    Column("revision", BigInteger, nullable=False, server_default="0"),
    # User attributes that were set in this epoch, as JSON like the metrics; NULL if there are none.
    Column("attributes", Text),
    # Artifacts that were logged in this epoch, as a JSON list; NULL if there are none.
    Column("artifacts", Text),
    Index("epochs_revision", "plan", "revision"),
)

# The last lines that user code has logged in an epoch, apart from the epochs, which are read as a
# whole. An epoch that failed may have lines, too, so there is no foreign key to epochs.
log_lines = Table(
    "log_lines",
    metadata,
    Column("plan", ForeignKey("plans.id"), primary_key=True),
    Column("node", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("num_bytes", Integer, nullable=False),
    Column("lines", Text, nullable=False),
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
    # Training loss of the last epoch, only for a state whose file belongs to another plan.
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
    # NULL if nothing was measured.
    Column("device", Text),
    # Peak memory of the worker's process so far.
    Column("peak_bytes", BigInteger),
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
    # The number of the last batch of records that a driver wrote, so that none is written twice.
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
    # Metrics by name if the study has several objectives; NULL if it has one.
    Column("objectives", JSON(none_as_null=True)),
    # NULL if the study has no constraints.
    Column("violation", Float),
    # The nodes of the replicas after the first, whose node is ``node``; NULL if there is one seed.
    Column("replicas", JSON(none_as_null=True)),
    # The epoch at which the training ends; NULL if that is the study's ``max_epochs``.
    Column("horizon", Integer),
    # A covering index: the status of a study can be computed without reading the trials.
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
    # The enqueued configuration; ``trial`` is then its place in the queue.
    Column("config", JSON(none_as_null=True)),
)

# Acts of people on a study: requests, which the process that runs it applies once, and notes.
acts = Table(
    "acts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    # NULL if the act is about the whole study.
    Column("trial", Integer),
    Column("text", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("at", Float, nullable=False),
    # NULL while it is queued.
    Column("applied_at", Float),
    Column("answer", Text, nullable=False, server_default=""),
)

# Studies that were deleted: all their rows in one value, so that nothing else finds them.
trash = Table(
    "trash",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("plan", ForeignKey("plans.id"), nullable=False, index=True),
    Column("num_trials", Integer, nullable=False),
    Column("who", Text, nullable=False),
    Column("at", Float, nullable=False),
    # Node and epoch of each trial, whose states stay as long as the study can be restored.
    Column("nodes", JSON, nullable=False),
    # JSON, compressed by zlib; see ``_trash``.
    Column("rows", LargeBinary, nullable=False),
)

# Trials of earlier studies that a study learned from when it was made. They are copied, so that a
# resumed study sees the same ones.
priors = Table(
    "priors",
    metadata,
    Column("study", ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("config", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("target", Integer, nullable=False),
    Column(
        "metrics", Text, nullable=False
    ),  # a JSON list with the metrics of each epoch, as in `epochs`
)

# Times of packs of a structure on a device. They belong to no study, so all studies use them.
curves = Table(
    "curves",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("device", Text, nullable=False),
    Column("structure", Text, nullable=False),
    Column("curves", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)
