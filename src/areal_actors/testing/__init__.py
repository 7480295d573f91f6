"""What the project's tests are made of, for the tests of its users as well."""
