"""What the dashboard shows, as values of the API."""
