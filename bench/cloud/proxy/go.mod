module s3proxy

go 1.22
