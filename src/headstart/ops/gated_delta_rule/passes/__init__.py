"""What both GPU implementations launch before their scans, and how any of it is launched."""
