"""The error bar of a mean of many predictions against its error over many retrained nets."""
