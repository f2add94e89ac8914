"""Numbers that judge a forecast."""
