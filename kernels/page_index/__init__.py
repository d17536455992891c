"""Block tables in the forms that other kernels want: CSR and intervals."""
