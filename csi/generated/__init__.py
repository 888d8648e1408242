"""The modules that protoc makes of proto/ when the package is built."""
