"""From a study folder to one HTML page; reads only folders."""
