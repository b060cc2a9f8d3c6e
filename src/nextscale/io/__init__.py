"""What every room uses: arguments, files, devices, progress."""
