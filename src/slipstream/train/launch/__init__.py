"""From a command to ranks: requests, starting, joining, and telling why a rank ended."""
