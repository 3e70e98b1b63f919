"""Other libraries, with remat."""
