"""What every experiment stands in: the command's list, parts kept on disk, pages, figures."""
