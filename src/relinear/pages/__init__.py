"""Pages of reports: one template for all, and the blocks that pages consist of."""
