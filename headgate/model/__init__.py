"""The decoder, its cache, and what turns it into something that other tools can load."""
