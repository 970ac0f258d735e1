"""The pages that people look at: one template for them all, and what a page is put together from."""
