"""Sub-sampling bandits: SS, its asynchronous form and BOSS."""
