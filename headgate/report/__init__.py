"""From a study folder to one HTML page; reads folders alone."""
