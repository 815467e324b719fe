"""Where streams begin: one file a format."""
