"""K models as one batched computation."""
