"""What the twins share on CPUs: portions of rows that stay in cache, products of blocks, products that gate."""
