"""What the tests of the gfx950 executor share."""
