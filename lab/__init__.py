"""Only so that the tests in `lab/tests` have names of their own (`lab.tests.*`)."""
