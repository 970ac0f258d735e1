"""What the twins share on CPUs: portions of rows that stay in cache, compiled functions, products that gate."""
