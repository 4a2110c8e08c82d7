"""Does a prepared network keep its promises? See README.md."""
