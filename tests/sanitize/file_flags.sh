# For scripts that compile the C code without setup.py.
#   file_flags MACHINE FILE     prints the flags that the first line of a SIMD variant states; status 1: not a file of this machine
file_flags() {
    line=$(sed -n '1s|^/\* flags for \([a-z0-9_]*\):\(.*\)\*/$|\1\2|p' "$2")
    case $line in
    '') ;;
    "$1 "*) echo "${line#* }" ;;
    *) return 1 ;;
    esac
}
