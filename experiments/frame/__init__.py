"""What all experiments share: the command's list, parts kept on disk, pages and figures."""
