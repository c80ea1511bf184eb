"""The decoder, its cache, and what turns it into something other tools load."""
