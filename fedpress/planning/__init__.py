"""What a task would cost before it is started, profile by profile: fedpress plan."""
